"""Credit assignment over ``[T, N]`` rollouts: seven recurrences, as fused Triton scans or in plain torch."""

from kernels.credit import Credit, CreditWithMoments, Scan, VTrace, VTraceWithMoments, gae, vtrace
from kernels.q_targets import retrace, retrace_categorical
from kernels.returns import discounted_returns, td_lambda
from kernels.traces import eligibility_traces, episodic_prefix_sum

__all__ = [
    "Credit",
    "CreditWithMoments",
    "Scan",
    "VTrace",
    "VTraceWithMoments",
    "discounted_returns",
    "eligibility_traces",
    "episodic_prefix_sum",
    "gae",
    "retrace",
    "retrace_categorical",
    "td_lambda",
    "vtrace",
]
