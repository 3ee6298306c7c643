"""The equations of sequence mixers, one operator a file, over whatever numbers they are given. Needs only numpy."""

from __future__ import annotations

from importlib import import_module

from .spec import Operator

# one line per operator: name -> (module, attribute)
OPERATORS: dict[str, tuple[str, str]] = {
    "gma.responsibilities": ("gma", "RESPONSIBILITIES"),
    "gma.bidirectional": ("gma", "BIDIRECTIONAL"),
    "gma.causal": ("gma", "CAUSAL"),
    "gma.cross": ("gma", "CROSS"),
    "gma.hybrid": ("gma_hybrid", "HYBRID"),
    "gma.hybrid_gated": ("gma_hybrid", "GATED"),
    "tala": ("tala", "OPERATOR"),
    "tala.phi_a": ("feature_maps", "PHI_A"),
    "tala.phi_b": ("feature_maps", "PHI_B"),
    "tala.n1": ("tala_normalised", "N1"),
    "tala.n2": ("tala_normalised", "N2"),
    "tala.n3": ("tala_normalised", "N3"),
    "tala.time_varying": ("tala_decays", "TIME_VARYING"),
    "tala.key_channel": ("tala_decays", "KEY_CHANNEL"),
    "tala.value_channel": ("tala_decays", "VALUE_CHANNEL"),
    "tala.elementwise": ("tala_decays", "ELEMENTWISE"),
    "mome": ("mome", "OPERATOR"),
    "mome.write_mix": ("mome", "WRITE_MIX"),
    "mome.top_k": ("mome", "TOP_K"),
    "mome.top_k_hold": ("mome", "TOP_K_HOLD"),
    "mixformer": ("mixformer", "OPERATOR"),
    "retention": ("retention", "OPERATOR"),
    "multi_scale_retention": ("multi_scale_retention", "OPERATOR"),
    "linear_attention": ("linear_attention", "OPERATOR"),
    "linear_transformer": ("linear_transformer", "OPERATOR"),
    "performer": ("performer", "OPERATOR"),
    "gated_linear_attention": ("gated_linear_attention", "OPERATOR"),
    "gated_linear_attention.simple": ("gated_linear_attention", "SIMPLE"),
    "mamba.zoh": ("mamba", "ZOH"),
    "mamba.euler": ("mamba", "EULER"),
    "mamba.lti": ("mamba_lti", "OPERATOR"),
    "mamba.block": ("mamba_block", "OPERATOR"),
    "titans.linear": ("titans", "LINEAR"),
    "titans.chunked": ("titans", "CHUNKED"),
    "titans.mlp": ("titans_mlp", "OPERATOR"),
    "softmax_attention": ("softmax_attention", "OPERATOR"),
    "softmax_attention.cached": ("cached_attention", "OPERATOR"),
    "sigmoid_attention": ("sigmoid_attention", "OPERATOR"),
    "sigmoid_attention.hybrid": ("sigmoid_hybrid", "OPERATOR"),
    "linformer": ("linformer", "OPERATOR"),
    "ode_transformer.rk1": ("runge_kutta", "RK1"),
    "ode_transformer.rk2": ("runge_kutta", "RK2"),
    "ode_transformer.rk2_learned": ("runge_kutta", "RK2_LEARNED"),
    "ode_transformer.rk2_gated": ("runge_kutta", "RK2_GATED"),
    "ode_transformer.rk3": ("runge_kutta", "RK3"),
    "ode_transformer.rk4": ("runge_kutta", "RK4"),
    "mla": ("mla", "OPERATOR"),
    "mla.decompressed": ("mla", "DECOMPRESSED"),
    "gqla": ("gqla", "OPERATOR"),
    "mlra": ("mlra", "OPERATOR"),
    "mlra.concatenated": ("mlra", "CONCATENATED"),
    "tucker": ("tucker", "OPERATOR"),
    "iha": ("iha", "OPERATOR"),
    "iha.index_causal": ("iha", "INDEX_CAUSAL"),
    "gta": ("gta", "OPERATOR"),
    "gta.gated": ("gta", "GATED"),
    "mtla": ("mtla", "OPERATOR"),
    "cca": ("cca", "OPERATOR"),
    "ccgqa": ("ccgqa", "OPERATOR"),
}


def operator(name: str) -> Operator:
    """The operator called `name`. Raises KeyError with the nearest known name."""
    if name not in OPERATORS:
        from difflib import get_close_matches

        near = get_close_matches(name, OPERATORS, n=1, cutoff=0.4)
        raise KeyError(f"no operator {name!r}" + (f'; did you mean "{near[0]}"?' if near else ""))
    module, attribute = OPERATORS[name]
    return getattr(import_module(f".{module}", __name__), attribute)
