"""Operators: functions on tensors without parameters, by PyTorch's own operators or by kernels.

All take and return `[batch, time, channels]`. Every causal one takes a state and returns one, for any number of tokens.
"""

from tcnca.ops.activations import ACTIVATIONS, Activation, activation
from tcnca.ops.attention.api import chunked_attention, required_max_length
from tcnca.ops.attention.naive import (
    ATTENTION_ACTIVATIONS,
    AttentionActivation,
    AttentionState,
    attend,
    initial_attention_state,
    offset_bias,
    rotary_bias,
    rotate,
    rotate_heads,
    shift_keys,
    split_heads,
)
from tcnca.ops.checks import autocasts, check_lengths, check_tensor, check_values, without_autocast
from tcnca.ops.context import ContextParallel, current_context
from tcnca.ops.dropout import dropout
from tcnca.ops.ema.api import EMAActivation, EMABackend, EMAState, ema, initial_ema_state
from tcnca.ops.ema.naive import ema_kernel
from tcnca.ops.long_conv import LongConvState, fft_convolve, initial_long_conv_state, long_conv
from tcnca.ops.ngrams import NGramState, hash_ngrams, initial_ngram_state, next_ngram_state
from tcnca.ops.padding import advance, length_mask, roll_time, take_time, zero_padding
from tcnca.ops.ssm.api import ScanBackend, SSMBackend, SSMState, diagonal_scan, initial_ssm_state, ssm
from tcnca.ops.ssm.naive import ssm_kernel
from tcnca.ops.state import State
from tcnca.ops.tcn.api import TCNBackend, tcn
from tcnca.ops.tcn.naive import TCNState, initial_tcn_state, lag_counts, receptive_field

__all__ = [
    "ACTIVATIONS",
    "ATTENTION_ACTIVATIONS",
    "Activation",
    "AttentionActivation",
    "AttentionState",
    "ContextParallel",
    "EMAActivation",
    "EMABackend",
    "EMAState",
    "LongConvState",
    "NGramState",
    "SSMBackend",
    "SSMState",
    "ScanBackend",
    "State",
    "TCNBackend",
    "TCNState",
    "activation",
    "advance",
    "attend",
    "autocasts",
    "check_lengths",
    "check_tensor",
    "check_values",
    "chunked_attention",
    "current_context",
    "diagonal_scan",
    "dropout",
    "ema",
    "ema_kernel",
    "fft_convolve",
    "hash_ngrams",
    "initial_attention_state",
    "initial_ema_state",
    "initial_long_conv_state",
    "initial_ngram_state",
    "initial_ssm_state",
    "initial_tcn_state",
    "lag_counts",
    "length_mask",
    "long_conv",
    "next_ngram_state",
    "offset_bias",
    "receptive_field",
    "required_max_length",
    "roll_time",
    "rotary_bias",
    "rotate",
    "rotate_heads",
    "shift_keys",
    "split_heads",
    "ssm",
    "ssm_kernel",
    "take_time",
    "tcn",
    "without_autocast",
    "zero_padding",
]
