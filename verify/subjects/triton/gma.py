"""Gaussian mixture attention in Triton, forward: responsibilities, aggregation, broadcasting; no (N, K) array.

Source: GMA (arXiv 2606.18283) (3), (5), (7), (14), (16) and the causal form. Each head has its own mixture:

    s_nk = alpha_k - 1/2 sum_r log var_kr - 1/2 sum_r (x_nr - mu_kr)^2 / var_kr                   (16)
    gamma_nk = exp(s_nk - max_l s_nl) / sum_l exp(s_nl - max_l s_nl)                              (3)
    S_k = sum_j gamma_k(k_j) v_j,  Z_k = sum_j gamma_k(k_j)                                       (5)
    O_i = sum_k gamma_k(q_i) S_k / (sum_k gamma_k(q_i) Z_k + eps)                                 (7)

Two passes over the components: the first keeps only two numbers of each token, the second makes
responsibilities one tile of components at a time where they are used. So nothing depends on K, R or V fitting in a
block. Token sums are partial sums of fixed stretches of tokens, added in order: no atomics, the same bits every run.
A row of the output depends on tile shapes, which depend on K, V and chunk alone, not on T, B or H.

The kernels compute in float32 (dot products in full precision, "ieee"); inputs are converted on load, O on store.
On a machine without CUDA the kernels run in Triton's interpreter, which truncates float32 to bfloat16 on store instead
of rounding; the gate repairs that first (interpreter.activate), or withholds bfloat16 verdicts.

    letter     shape                                  meaning
    top total  (B, H, N)                              max_k s_nk and sum_k exp(s_nk - top_n) of each token
    part       (B, H, parts, K, V), (B, H, parts, K)  sums over stretches of tokens, then the states before them
    t i j kk vv                                       indices of a tile: tokens, queries, keys, components, channels
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from mixproof.verify import implements
from mixproof.verify.subjects.triton import gma_kernels as kernels
from mixproof.verify.subjects.triton.gma_kernels import triton

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DECLARED = {
    "name": "triton.fused",
    "layout": "B T H D",
    "dtypes": ("float32", "float16", "bfloat16"),
    "dot": "float32",
    "exp_ulps": 3,  # ex2.approx is good to 2 ulp, _exp adds a rounding
    "gradients": False,
    "devices": ("cpu", "cuda"),
    "requires": ("triton",),
    "slow": True,
    "chunk": 64,
}


@implements("gma.responsibilities", **DECLARED)
def responsibilities(x: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, v_min: float = 0.0) -> Tensor:
    """gamma_k(x_n): x (B, T, H, R), mu and omega (H, K, R), alpha (H, K) -> (B, T, H, K)."""
    B, T, H, R, K = _sizes("BTHRK", {"x": (x, "BTHR")} | _mixture(mu, omega, alpha), v_min=v_min)
    gamma = torch.empty(B, T, H, K, dtype=x.dtype, device=x.device)
    shape = _tiles(K, 1)
    with _launching(x):
        table = _tables(mu, omega, alpha, v_min)
        top, total = _normalisers(x, table, shape)
        grid = (B * H * triton.cdiv(T, shape.BT) * triton.cdiv(K, shape.BK),)
        _start(
            kernels.gamma_kernel,
            grid,
            x,
            top,
            total,
            *table,
            gamma,
            *x.stride(),
            *gamma.stride(),
            H,
            T,
            K,
            R,
            *shape[:2],
        )
    return gamma


@implements("gma.bidirectional", **DECLARED)
def bidirectional(
    q: Tensor, k: Tensor, v: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, eps: float = 1e-6, v_min: float = 0.0
) -> Tensor:
    """Every token reads every token: q, k (B, T, H, R), v (B, T, H, V) -> O (B, T, H, V)."""
    arguments = {"q": (q, "BTHR"), "k": (k, "BTHR"), "v": (v, "BTHV")}
    _sizes("T", arguments | _mixture(mu, omega, alpha), eps=eps, v_min=v_min)
    return cross(q, k, v, mu, omega, alpha, eps, v_min)


@implements("gma.cross", **DECLARED)
def cross(
    q: Tensor, k: Tensor, v: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, eps: float = 1e-6, v_min: float = 0.0
) -> Tensor:
    """T queries read a context of S tokens: q (B, T, H, R), k (B, S, H, R), v (B, S, H, V) -> O (B, T, H, V)."""
    arguments = {"q": (q, "BTHR"), "k": (k, "BSHR"), "v": (v, "BSHV")}
    B, T, H, S, V, K = _sizes("BTHSVK", arguments | _mixture(mu, omega, alpha), eps=eps, v_min=v_min)
    O = torch.empty(B, T, H, V, dtype=q.dtype, device=q.device)
    shape = _tiles(K, V)
    # At most about 64 stretches: memory stays bounded in S, and each is long enough to be worth a program.
    stretch = shape.BT * max(1, triton.cdiv(S, 64 * shape.BT))
    with _launching(q):
        table = _tables(mu, omega, alpha, v_min)
        norms = _normalisers(q, table, shape)
        _, _, sums, counts = _states(k, v, table, _normalisers(k, table, shape), shape, stretch, None, None)
        _read(q, k, v, norms, norms, table, sums[:, :, None], counts[:, :, None], O, eps, shape, None)
    return O


@implements("gma.causal", **DECLARED)
def causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mu: Tensor,
    omega: Tensor,
    alpha: Tensor,
    eps: float = 1e-6,
    v_min: float = 0.0,
    S0: Tensor | None = None,
    Z0: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Token i reads tokens j <= i and the state S0 (B, H, K, V), Z0 (B, H, K) before them; -> O (B, T, H, V) and the
    float32 state S, Z after them. States are kept every `chunk` tokens; inside a chunk the affinity is masked."""
    arguments = {"q": (q, "BTHR"), "k": (k, "BTHR"), "v": (v, "BTHV")} | _mixture(mu, omega, alpha)
    arguments |= {"S0": (S0, "BHKV"), "Z0": (Z0, "BHK")}
    B, T, H, V, K = _sizes("BTHVK", arguments, eps=eps, v_min=v_min)
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk is {chunk!r}; expected a whole number of tokens, at least 1")
    O = torch.empty(B, T, H, V, dtype=q.dtype, device=q.device)
    shape = _tiles(K, V, chunk)
    chunk = min(chunk, max(T, 1))
    with _launching(q):
        table = _tables(mu, omega, alpha, v_min)
        norms_q, norms_k = _normalisers(q, table, shape), _normalisers(k, table, shape)
        before_S, before_Z, S, Z = _states(k, v, table, norms_k, shape, chunk, S0, Z0)
        _read(q, k, v, norms_q, norms_k, table, before_S, before_Z, O, eps, shape, chunk)
    return O, S, Z


# ---- launches ------------------------------------------------------------------------------------------------------


class _Tiles(NamedTuple):
    """Tokens, components and channels of a tile. tl.dot wants at least 16 of each."""

    BT: int
    BK: int
    BV: int


class _Table(NamedTuple):
    """What the kernels need of the mixtures, float32, the component axis last: loads of a tile are contiguous."""

    mean: Tensor  # (H, R, K)
    precision: Tensor  # (H, R, K) 1 / var
    bias: Tensor  # (H, K) alpha - 1/2 sum_r log var


def _tiles(K: int, V: int, chunk: int = 64) -> _Tiles:
    # Chosen so that no kernel spills registers on sm_90, whatever divides the sizes: tests/test_triton_compiled.py.
    sizes = zip((32, 32, 64), (chunk, K, V), strict=True)
    return _Tiles(*(min(most, max(16, triton.next_power_of_2(n))) for most, n in sizes))


@torch.no_grad()
def _tables(mu: Tensor, omega: Tensor, alpha: Tensor, v_min: float) -> _Table:
    # In float64, rounded once: torch's float32 bits depend on strides and on where in the tensor an element stands.
    var = torch.nn.functional.softplus(omega.double(), threshold=40) + v_min  #                               (14)
    bias = alpha.double() - 0.5 * var.log().sum(-1)
    mean, precision = (x.float().mT.contiguous() for x in (mu, var.reciprocal()))
    return _Table(mean, precision, bias.float().contiguous())


def _normalisers(x: Tensor, table: _Table, shape: _Tiles) -> tuple[Tensor, Tensor]:
    B, T, H, R = x.shape
    top, total = (torch.empty(B, H, T, dtype=torch.float32, device=x.device) for _ in range(2))
    grid = (B * H * triton.cdiv(T, shape.BT),)
    _start(
        kernels.normaliser_kernel, grid, x, top, total, *table, *x.stride(), H, T, table.bias.shape[1], R, *shape[:2]
    )
    return top, total


def _states(
    k: Tensor,
    v: Tensor,
    table: _Table,
    norms: tuple[Tensor, Tensor],
    shape: _Tiles,
    stretch: int,
    S0: Tensor | None,
    Z0: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The states before every stretch of tokens, (B, H, parts, K, V) and (B, H, parts, K), and those after the last."""
    (B, T, H, R), V, K = k.shape, v.shape[-1], table.bias.shape[1]
    parts = triton.cdiv(T, stretch)
    part_S, part_Z, S, Z = (
        torch.empty(B, H, *size, dtype=torch.float32, device=k.device)
        for size in ((parts, K, V), (parts, K), (K, V), (K,))
    )
    grid = (B * H * parts * triton.cdiv(K, shape.BK) * max(triton.cdiv(V, shape.BV), 1),)
    arguments = (k, v, *norms, *table, part_S, part_Z, *k.stride(), *v.stride(), H, T, K, R, V, parts, stretch)
    _start(kernels.aggregate_kernel, grid, *arguments, *shape)
    for part, initial, final, n in ((part_S, S0, S, V), (part_Z, Z0, Z, 1)):
        strides = (0, 0, 0, 0) if initial is None else (*initial.stride(), 0)[:4]
        grid = (B * H * triton.cdiv(K * n, 256),)
        _start(kernels.prefix_kernel, grid, part, initial, final, *strides, H, parts, K * n, n, 256)
    return part_S, part_Z, S, Z


def _read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norms_q: tuple[Tensor, Tensor],
    norms_k: tuple[Tensor, Tensor],
    table: _Table,
    S: Tensor,
    Z: Tensor,
    O: Tensor,
    eps: float,
    shape: _Tiles,
    chunk: int | None,
) -> None:
    """Fills O from the states S (B, H, parts, K, V), Z (B, H, parts, K), and inside chunks if there are chunks."""
    (B, T, H, R), V, (parts, K) = q.shape, v.shape[-1], Z.shape[2:]
    stretch = chunk or T
    grid = (B * H * parts * triton.cdiv(stretch, shape.BT) * triton.cdiv(V, shape.BV) if T else 0,)
    arguments = (q, k, v, *norms_q, *norms_k, *table, S, Z, O)
    strides = (*q.stride(), *k.stride(), *v.stride(), *O.stride())
    sizes = (H, T, K, R, V, parts, stretch, float(eps))
    _start(kernels.read_kernel, grid, *arguments, *strides, *sizes, chunk is not None, *shape)


def _start(kernel: Any, grid: tuple[int], *arguments: Any) -> None:
    if grid[0]:
        kernel[grid](*arguments, num_warps=8)


@contextmanager
def _launching(x: Tensor) -> Iterator[None]:
    """On x's device. Interpreted kernels overflow as silently as compiled ones."""
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext(), np.errstate(all="ignore"):
        yield


# ---- arguments -----------------------------------------------------------------------------------------------------


def _mixture(mu: Tensor, omega: Tensor, alpha: Tensor) -> dict[str, tuple[Tensor, str]]:
    return {"mu": (mu, "HKR"), "omega": (omega, "HKR"), "alpha": (alpha, "HK")}


def _sizes(wanted: str, arguments: Mapping[str, tuple[Tensor | None, str]], **scalars: float) -> list[int]:
    """The sizes of the axes `wanted`, of tensors named with their axes; the first sets the device and, for those with
    tokens, the dtype. Raises TypeError or ValueError naming the argument that does not fit."""
    sizes: dict[str, int] = {}
    first = next(iter(arguments))
    for name, (x, axes) in arguments.items():
        if x is None and name in ("S0", "Z0"):
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; expected a torch tensor")
        like = arguments[first][0]
        assert like is not None
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}; expected float32, float16 or bfloat16")
        if set(axes) & {"T", "S"} and x.dtype != like.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, but {first} has {like.dtype}")
        if x.device != like.device:
            raise ValueError(f"{name} is on {x.device}, but {first} is on {like.device}")
        if x.dim() != len(axes):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected ({', '.join(axes)})")
        for axis, n in zip(axes, x.shape, strict=True):
            if sizes.setdefault(axis, n) != n:
                raise ValueError(f"{name} has shape {tuple(x.shape)}: axis {axis} is {n}, but elsewhere {sizes[axis]}")
        # on a GPU a look at values would hold up the stream
        if name in ("mu", "omega", "alpha") and x.is_cpu and x.isnan().any():
            raise ValueError(f"{name} contains NaN")
    if sizes["K"] == 0:
        raise ValueError("mu has no components; expected K >= 1")
    for name, value in scalars.items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} is {value}; it must be finite and not negative")
    return [sizes[axis] for axis in wanted]
