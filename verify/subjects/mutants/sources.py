"""The public bugs that mutants stand for: what kind of mistake, what it takes to be seen, where it was made.

A mutant names one in `source` when it is the same mistake, in the same operator or in another. A mutant without one is
our own: nobody is known to have made it in public. References are issues, pull requests or commits of the projects
named: fla is flash-linear-attention, FA FlashAttention, TE Transformer Engine; "class" marks one that is alike."""

from __future__ import annotations

from typing import NamedTuple


class Bug(NamedTuple):
    """`kind` of mistake, the `trigger` without which it does not show, the `public` places where it was found."""

    kind: str
    trigger: str
    public: str


SOURCES: dict[str, Bug] = {
    "tala-tail-decay": Bug(
        "tail-chunk", "T % C != 0 and final state used", "fla e361dd3a (RetNet fused_chunk), flashinfer#4311"
    ),
    "tala-h0-short": Bug("initial-state", "h0 given and T < chunk", "fla#88 01f02517, titans 2206dcc"),
    "tala-idx-wrap": Bug(
        "int overflow",
        "t*K over the integer range",
        "fla#1082 31d15f75, #803, #964, mamba#1015, FA#1500",
    ),
    "tala-mask-after-exp": Bug(
        "exp overflow", "sum of log gates in a chunk < -88 (fp32)", "mamba bb3a82a, fla#99/#104, fla 39fc5878"
    ),
    "tala-factored-exp": Bug(
        "exp overflow", "cumulative gate < -88 inside a chunk", "fla 0c1c0b65 (RWKV6), fla#649, fla#122"
    ),
    "tala-safe-exp-zero": Bug("special value", "log gate exactly 0", "fla#461, fla#104"),
    "tala-tail-nomask": Bug("causality", "T % C != 0", "fla#794 91d870f8, FA a4f148b6"),
    "tala-global-cumsum": Bug("wrong gate index", "T > C", "fla ddee66d9"),
    "tala-inter-exclusive": Bug("wrong gate index", "T > C", "fla 9d148e32, fla 0c1c0b65"),
    "tala-leak-state": Bug("causality", "any chunk with > 1 token", "own; class of litgpt#2182"),
    "tala-vsplit-state": Bug("tile split", "V > tile width", "fla 36dedac3 (GLA D>256), fla#589"),
    "tala-bf16-state": Bug("dtype", "T > C, long T, gates near 1", "fla 8641906e, fla#1187, fla#740"),
    "tala-no-dht": Bug("final-state gradient", "dht != 0", "fla c3f16354, mamba#101 (documented omission)"),
    "tala-dv-scale": Bug("scale", "scale passed", "fla#47 85992884"),
    "tala-dq-lastblock": Bug("tile split", "V > tile", "fla#941 e4c7f880, fla#1033"),
    "tala-dg-nofinal": Bug("final-state gradient", "dht != 0", "fla 31293264, fla#486"),
    "tala-do-raw-T": Bug("layout", "dO non-contiguous", "fla#871, mamba#1036, FA b4cc152e/88c4e5db"),
    "tala-dS-bf16": Bug("dtype", "long T", "fla c39d0ef2, fla#676"),
    "tala-vl-empty": Bug("varlen", "repeated cu_seqlens entry", "FA a3a257c7, FA#2421, flashinfer#868"),
    "tala-vl-reset-aligned": Bug("varlen", "cu[i] % C != 0", "vllm#23279, fla#904"),
    "gma-no-logdet": Bug(
        "missing term",
        "variances differ between components (default init hides it)",
        "GMA Eq. score; class: fla f0156a75, transformers#47435",
    ),
    "gma-key-over-time": Bug("wrong axis", "T > 1", "fla#850/#851 (naive reference), fla#594"),
    "gma-no-max": Bug(
        "exp underflow",
        "all scores < -104 (fp32): points far from every mean",
        "fast-transformers b886c6a (FAVOR), flashinfer#4267",
    ),
    "gma-den-chunk": Bug("causality", "C > 1", "own; class of fla#594"),
    "gma-den-clamp": Bug("eps", "query overlaps no past key", "fla#875 eps in normalised linear attention"),
    "gma-tail-pad": Bug("tail-chunk", "T % C != 0", "class of mamba#368"),
    "gma-resume-noZ": Bug("initial-state", "initial state given", "fla#875 z_state"),
    "gma-mask-v-only": Bug("mask", "padding inside the sequence", "fla 670f5706, maxtext#878"),
    "gma-Z-bf16": Bug("dtype", "T large", "fla#875 (output_dtype=k.dtype), fla f494277f"),
    "gma-den-detach": Bug("missing gradient term", "any backward", "fla#875 4b02d15d (missing dk through the cumsum)"),
    "gma-jac-diag": Bug("missing gradient term", "any backward", "GMA gradient identity; class TE#2139"),
    "gma-dvar-nologdet": Bug("missing gradient term", "any backward", "fla 9d148e32 class"),
    "scan-sp-overflow": Bug("exp overflow", "dt pre-activation > 88", "mamba 3854ad8, mamba#574 9259852"),
    "scan-euler-A": Bug(
        "wrong discretisation", "dt A not small (default init dt ~1e-2 hides it)", "own; class of fla#1012"
    ),
    "scan-pad-decay": Bug("tail-chunk", "T % C != 0 and delta_bias/softplus", "mamba#368"),
    "scan-state-noB": Bug("final-state", "B not input dependent, last_state requested", "mamba#371"),
    "scan-D-after": Bug("order of operations", "D and z both given", "own; class of fla a5baa970"),
    "scan-h0-first-chunk": Bug("initial-state", "h0 and T > C", "vllm#21783, transformers#46741"),
    "scan-seq-ignored": Bug(
        "varlen", "packed input on the slow path", "mamba 8ffd905, axolotl#3572 (fallback), prime-rl#3001"
    ),
    "scan-state-bf16": Bug("dtype", "T > C", "fla#1187; class of mamba#869"),
    "scan-logspace": Bug("exp overflow", "a = 0 or product underflow", "fla 2438b7bf (Titans cumprod -> log space)"),
    "attn-max0": Bug("masked-row / sentinel", "all valid logits below the sentinel", "flashinfer#4267/#4401"),
    "attn-nan-block": Bug(
        "masked-row / sentinel",
        "first key block fully masked",
        "xformers#564, flashinfer#1178, executorch#10466, xformers#1185",
    ),
    "attn-finite-mask": Bug(
        "masked-row / sentinel",
        "row with no legal key, or logits near the constant",
        "lattice#6 NSA soft mask, pytorch#110213, nGPT#11",
    ),
    "attn-tail-zero": Bug("tail-chunk", "Tk % block != 0, non-causal", "flashinfer#3717, FA c65b5106"),
    "attn-top-left": Bug("causal alignment", "Tq != Tk", "onnx#8068, lalamo#200, nanochat#456 (cites pytorch#144858)"),
    "attn-win-plus1": Bug("off by one", "window < T", "NSA-pytorch d1f5d41, xformers b0852323"),
    "attn-drop-causal-mask": Bug(
        "mask on fallback path", "mask and causal together", "keras#23040 second finding, xformers#104"
    ),
    "attn-mask-first-block": Bug("mask", "Tk > block with a mask", "xformers#952 bias stride"),
    "attn-pad-scale": Bug(
        "head dim", "head dim not a power of two", "class: FA Triton headdim 40/48 (215930bc, 470010f5)"
    ),
    "attn-no-rescale": Bug(
        "online softmax", "row max grows in the last block", "NSA-pytorch 7ebebca (max tracking), FA#2717 stale max"
    ),
    "attn-sink-raw": Bug("missing term", "sink given", "FA e81c237e"),
    "attn-tf32": Bug("dtype", "fp32 inputs, large logits", "triton#8654, triton#5895, fla#544"),
    "attn-stale-scale": Bug(
        "history dependence", "two calls of equal shape, different scale", "flashinfer#4014, FA#2143 cache key, FA#1953"
    ),
    "attn-lse-base2": Bug("split-KV merge", "more than one KV split", "flashinfer#787 23413e00"),
    "attn-bwd-tail": Bug("tail-chunk", "T % block != 0", "FA a4f148b6, NSA-pytorch 97aa4ae"),
    "attn-no-delta": Bug("missing gradient term", "any backward", "FA b3f1b6a5 (wrong dPsum index)"),
    "mla-scale-latent": Bug("scale", "always", "class: vllm#12639 absorb; flashinfer MLA"),
    "mla-rope-twice": Bug("positions", "S > T", "flashinfer#793"),
    "mla-rope-layout": Bug("positions", "position > 0", "vllm#28968, litgpt#2202, TransMLA 7749e90"),
    "mla-uk-head0": Bug("head indexing", "H > 1", "fla#781, Liger#477"),
    "mla-dv-as-dn": Bug("head dim", "d_v > d_nope", "fla#633, FA 9e07d6d3/e3b2400a/6d199aa2, TE#1896"),
    "rope-pos-bf16": Bug("dtype", "position > 256", "class: FA alibi/float32 #846; transformers rope fp32 rule"),
    "conv-fs-short": Bug("short sequence", "T < W-1 with a state", "mamba fc80874, fla#615"),
    "conv-fs-post": Bug("order of operations", "state used", "fla d35cfa91, lm-engine#502"),
    "conv-block-halo": Bug("tail-chunk", "T % BT != 0", "fla#615/#774"),
    "conv-has-initial": Bug("initial-state", "no state given, dirty buffer", "vllm-ascend#10558"),
    "conv-cross-seq": Bug("varlen", "cu % block != 0", "mamba 8ffd905, fla#714, prime-rl#3001"),
    "conv-dfs-clamp": Bug("short sequence", "T < W-1 and dht", "fla#1141 a252c17d"),
    "conv-dst-pass": Bug("short sequence", "T < W-1, h0 and dht", "fla#1141 (pass-through), fla#1146"),
    "conv-silu-post": Bug("missing gradient term", "activation", "fla#921 (activation backward), fla#1071"),
    "delta-err-before-decay": Bug("order of operations", "gate != 1", "fla#885 (question), class"),
    "delta-state-fp16": Bug("dtype", "long T or large v", "fla#1187 MesaNet fp16 state"),
    "l2norm-eps": Bug("eps", "|x| ~ 1e-6 or 0", "fla 9b9e47d7, #483 cde25dfd"),
    "titans-mom-reset": Bug("initial-state", "T > chunk", "titans-pytorch 899665c, 53dc3be"),
    "titans-read-start": Bug("wrong state read", "any", "titans-pytorch 53e7a88"),
    "route-w-biased": Bug("missing term", "bias != 0 (zero init hides it)", "flashinfer#3875 08ddfbcd"),
    "route-no-eps": Bug("eps", "logits < -750", "flashinfer#3946 57b77199"),
    "route-norm-all": Bug("wrong axis", "k < E", "TE#2720, TE#1944"),
    "rms-eps-out": Bug("eps", "rms ~ eps", "fla 9b9e47d7, torchscale#40"),
}

# public bugs that no operator here can have, and why
NOT_MODELLED: dict[str, str] = {
    "mla-no-mscale": "no operator scales its rotation, so none has the attention factor of YaRN: transformers#47435",
}

# the same mistakes where the mutants' own tables do not say so: names, or operators with them
SAME: dict[str, tuple[str, ...]] = {
    "tala-tail-decay": ("tail_decay",),
    "tala-h0-short": ("short_ignores_state",),
    "tala-global-cumsum": ("global_read",),
    "tala-inter-exclusive": ("exclusive_read", "tala/exclusive"),
    "tala-no-dht": (
        "vjp.no_state_cotangent", "vjp.no_final", "vjp.no_final_mass", "vjp.no_last_momentum", "vjp.caches",
        "mtla/vjp.no_cache", "mtla/vjp.no_keys", "ccgqa/vjp.no_cache", "linear_transformer/vjp.no_memory",
    ),
    "tala-bf16-state": ("bfloat16_state", "bfloat16_cache"),
    "tala-dv-scale": ("vjp.query_scale", "vjp.no_scale", "tucker/vjp.unscaled_queries"),
    "gma-key-over-time": ("over_tokens", "over_queries", "column_norm", "norm_over_time"),
    "gma-no-max": ("no_maximum",),
    "gma-den-chunk": ("mass_of_chunk",),
    "gma-den-clamp": ("clamped_mass", "eps_as_floor"),
    "gma-den-detach": ("vjp.constant_mass",),
    "gma-resume-noZ": ("mass_not_resumed", "linear_transformer/no_mass"),
    "gma-Z-bf16": ("bfloat16_mass",),
    "scan-logspace": ("quotients",),
    "attn-tf32": ("tf32_operands",),
    "attn-win-plus1": ("late_mask",),
    "attn-drop-causal-mask": ("no_mask",),
    "attn-no-delta": ("vjp.no_delta",),
    "attn-top-left": ("mask_from_zero", "mask_of_call"),
    "mla-scale-latent": ("latent_scale",),
    "mla-rope-layout": ("mixed_pairs", "mtla/halves"),
    "mla-uk-head0": (
        "first_head", "head_zero", "one_group", "group_zero", "block_zero", "first_group", "tucker/first_value_core",
    ),
    "delta-err-before-decay": ("decayed_first",),  # in Titans the error comes before the decay: the same exchange
    "l2norm-eps": ("tala.phi_b/eps_under_root",),
    "rms-eps-out": ("eps_outside",),
    "route-norm-all": ("normalised_over_all",),
}  # fmt: skip
_BY_NAME = {name: source for source, names in SAME.items() for name in names}


def same(operator: str, name: str) -> str:
    """The public bug that a mutant without a source of its own stands for, or nothing."""
    return _BY_NAME.get(f"{operator}/{name}", _BY_NAME.get(name, ""))
