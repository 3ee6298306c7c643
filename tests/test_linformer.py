"""Linformer against a plain transcription; what it is for special projections, and what it is not: causal, in the hull.

Two evaluations of one quantity may differ by twice what the gate allows one of them.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from mixproof.reference import linformer, operator, softmax_attention
from mixproof.verify.arithmetic import natural
from mixproof.verify.judge import PROFILES, judge
from mixproof.verify.numbers.ball import Reading, tolerance
from mixproof.verify.numbers.certified import certified_error, enclose
from mixproof.verify.subjects.mutants import Mutant
from mixproof.verify.subjects.mutants import linformer as mutants

torch = pytest.importorskip("torch")
linformer_torch = pytest.importorskip("mixproof.verify.subjects.torch.linformer")
OPERATOR = operator("linformer")
SIZES = [(1, 1, 2, 1, 1), (2, 5, 4, 3, 2), (7, 6, 3, 4, 3), (13, 9, 2, 5, 4)]  # T, S, K, V, X


def draw(T, S, K, V, X, scale=0.4):
    g = np.random.default_rng([T, S, K, V, X])
    I = {"q": g.standard_normal((T, K)), "k": g.standard_normal((S, K)), "v": g.standard_normal((S, V))}
    I |= {"E_k": g.standard_normal((X, S)), "E_v": g.standard_normal((X, S)), "scale": scale}
    return I, {"O": g.standard_normal((T, V))}


def lifted(I):
    reading = Reading(natural("float64"))
    return reading, {n: reading.ball(x) if np.ndim(x) else x for n, x in I.items()}


def allowed(I, function=linformer.projected):
    reading, balls = lifted(I)
    bound = tolerance(function(**balls), "float64")
    assert not reading.vacuous
    return bound


def plain(q, k, v, E_k, E_v, scale):
    """Query by query, mixture by mixture."""
    rows = []
    for x in q:
        s = torch.stack([scale * (x @ sum(E_k[a, j] * k[j] for j in range(len(k)))) for a in range(len(E_k))])
        p = torch.exp(s) / torch.exp(s).sum()
        rows.append(sum(p[a] * sum(E_v[a, j] * v[j] for j in range(len(v))) for a in range(len(E_v))))
    return torch.stack(rows)


@pytest.mark.parametrize("sizes", SIZES)
def test_it_is_the_plain_transcription(sizes):
    I, G = draw(*sizes)
    x = {n: torch.tensor(a, requires_grad=True) for n, a in I.items() if n != "scale"}
    O = plain(**x, scale=I["scale"])
    O.backward(torch.tensor(G["O"]))
    bound = allowed(I)
    for form in OPERATOR.forms:
        assert np.all(np.abs(form.function(**I) - O.detach().numpy()) <= 2 * bound)
    reading, balls = lifted(I)
    bounds = linformer.vjp({"O": reading.ball(G["O"])}, **balls)
    assert not reading.vacuous
    for n, d in linformer.vjp(G, **I).items():
        assert np.all(np.abs(d - x[n].grad.numpy()) <= 2 * tolerance(bounds[n], "float64")), n


@pytest.mark.parametrize("sizes", SIZES)
def test_forms_are_enclosed(sizes):
    I, _ = draw(*sizes)
    bound, truth = allowed(I), enclose(linformer.streamed, I)
    for form in OPERATOR.forms:
        assert np.all(certified_error(form.function(**I), truth) <= bound)


# --- special projections ---------------------------------------------------------------------------------------------


def test_with_identities_it_is_softmax_attention():
    """Bidirectional, and with the default scale."""
    I, _ = draw(7, 6, 3, 4, 6)
    I |= {"E_k": np.eye(6), "E_v": np.eye(6), "scale": None}
    full = {n: I[n] for n in "qkv"}
    bound = allowed(I) + allowed(full, softmax_attention.parallel)
    assert np.all(np.abs(linformer.projected(**I) - softmax_attention.parallel(**full)) <= bound)


def test_with_rows_of_an_identity_it_reads_those_tokens():
    I, _ = draw(7, 6, 3, 4, 2)
    I |= {"E_k": np.eye(6)[[4, 1]], "E_v": np.eye(6)[[4, 1]]}
    some = {n: I[n][[4, 1]] if n in "kv" else I[n] for n in ("q", "k", "v", "scale")}
    bound = allowed(I) + allowed(some, softmax_attention.parallel)
    assert np.all(np.abs(linformer.streamed(**I) - softmax_attention.parallel(**some)) <= bound)


def test_one_mixture_reads_the_same_for_every_query():
    I, _ = draw(7, 6, 3, 4, 1)
    O = linformer.projected(**I)
    assert np.all(O == I["E_v"] @ I["v"])


def test_numbering_mixtures_and_tokens_of_the_context():
    """Rows of both projections renumbered, or the context with its columns."""
    I, _ = draw(7, 6, 3, 4, 3)
    rows, columns = [2, 0, 1], [5, 1, 0, 3, 2, 4]
    by_row = I | {n: I[n][rows] for n in ("E_k", "E_v")}
    by_column = {n: I[n][columns] for n in "kv"} | {n: I[n][:, columns] for n in ("E_k", "E_v")}
    for moved in (by_row, I | by_column):
        assert np.all(np.abs(linformer.projected(**moved) - linformer.projected(**I)) <= allowed(moved) + allowed(I))
    assert np.max(np.abs(linformer.projected(**I | {n: I[n][columns] for n in "kv"}) - linformer.projected(**I))) > 0.1


# --- what it is not --------------------------------------------------------------------------------------------------


def test_the_first_output_reads_the_last_token():
    """And no mask over mixtures helps: each of them holds all tokens."""
    I, G = draw(6, 6, 3, 4, 3)
    changed = I | {n: np.concatenate([I[n][:-1], I[n][-1:] + 1]) for n in "kv"}
    assert np.min(np.abs(linformer.projected(**changed) - linformer.projected(**I))[0]) > 1e-3
    G["O"][1:] = 0
    d = linformer.vjp(G, **I)
    assert np.all(d["k"][-1])
    assert np.all(d["v"][-1])


def test_outputs_are_in_the_hull_of_the_mixtures():
    """Not in that of the values: E_v = (2, -1) takes 1 and 0 to 2; values of one do not give one."""
    I = {"q": np.ones((1, 1)), "k": np.ones((2, 1)), "v": np.array([[1.0], [0.0]])}
    I |= {"E_k": np.ones((1, 2)), "E_v": np.array([[2.0, -1.0]])}
    assert linformer.projected(**I).tolist() == [[2.0]]
    J, _ = draw(13, 9, 2, 5, 4)
    O, VX, bound = linformer.projected(**J), J["E_v"] @ J["v"], allowed(J)
    rounding = 16 * 2.0**-53 * (np.abs(J["E_v"]) @ np.abs(J["v"])).max(0)
    assert np.all(VX.min(0) - bound - rounding <= O)
    assert np.all(VX.max(0) + bound + rounding >= O)
    ones = linformer.projected(**J | {"v": np.ones_like(J["v"])})
    assert np.max(np.abs(ones - 1)) > 0.5


# --- the layer -------------------------------------------------------------------------------------------------------


def layer_and_tokens(S=9):
    torch.manual_seed(0)
    layer = linformer_torch.Linformer(heads=2, context=12, projected=3, chunk=4).double()
    sizes = ((5, 4), (S, 4), (S, 3))
    return layer, tuple(torch.randn(2, n, 2, d, dtype=torch.float64) for n, d in sizes)


@pytest.mark.parametrize("S", [1, 9, 12])
def test_the_layer_is_the_function_of_its_first_columns(S):
    layer, (q, k, v) = layer_and_tokens(S)
    O = layer(q, k, v, scale=0.3).detach().numpy()
    E_k, E_v = (E.detach().numpy()[:, :, :S] for E in (layer.E_k, layer.E_v))
    for b in range(2):
        for h in range(2):
            I = {n: x[b, :, h].numpy() for n, x in {"q": q, "k": k, "v": v}.items()}
            I |= {"E_k": E_k[h], "E_v": E_v[h], "scale": 0.3}
            assert np.all(np.abs(O[b, :, h] - linformer.streamed(**I)) <= 2 * allowed(I))


def test_a_layer_loads_what_another_saved():
    layer, tokens = layer_and_tokens()
    torch.manual_seed(1)
    other = linformer_torch.Linformer(heads=2, context=12, projected=3, chunk=4).double()
    assert not torch.equal(other(*tokens), layer(*tokens))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(*tokens), layer(*tokens))


def test_projections_have_the_variance_of_the_released_code():
    E = linformer_torch.Linformer(heads=4, context=500, projected=16).E_k.detach()
    n = E.numel()
    assert abs(float((E * E).mean()) * 16 - 1) < 5 * math.sqrt(2 / n)  # five standard errors


def test_only_columns_of_tokens_have_gradients():
    layer, tokens = layer_and_tokens()
    layer(*tokens).sum().backward()
    for E in (layer.E_k, layer.E_v):
        assert torch.all(E.grad[:, :, :9] != 0)
        assert not E.grad[:, :, 9:].any()


def test_what_makes_no_sense():
    layer, (q, k, v) = layer_and_tokens()
    made = linformer_torch.Linformer
    for call, message in (
        (lambda: made(2, 12, 0), "projected is 0; it must be at least 1"),
        (lambda: made(2, 12, 3, chunk=0), "chunk is 0; it must be at least 1"),
        (lambda: layer(*layer_and_tokens(13)[1]), "k has 13 tokens; this layer has columns for 12"),
        (lambda: layer(q, k, v[:, :8]), r"v has shape \(2, 8, 2, 3\): axis S is 8, but k has S=9"),
        (lambda: layer(q, k, v, scale=math.nan), "scale is nan; it must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_builder_with_nothing_changed_raises_no_alarm():
    same = Mutant("same", OPERATOR.name, "nothing changed", (), forward=mutants.head(), vjp=mutants.head_vjp())
    for law in ("forward", "vjp", "extremes", "linearity", "relabelling"):
        assert judge(same.subject(), law, PROFILES["short"]).status == "pass", law
