"""Credit assignment over ``[T, N]`` rollouts and the losses of an update, as fused Triton kernels or in plain torch."""

from kernels.credit import Credit, CreditWithMoments, Scan, VTrace, VTraceWithMoments, gae, vtrace
from kernels.ppo_loss import PPOLoss, ppo_loss
from kernels.q_targets import retrace, retrace_categorical
from kernels.returns import discounted_returns, td_lambda
from kernels.traces import eligibility_traces, episodic_prefix_sum
from kernels.vtrace_loss import VTraceLoss, vtrace_loss

__all__ = [
    "Credit",
    "CreditWithMoments",
    "PPOLoss",
    "Scan",
    "VTrace",
    "VTraceLoss",
    "VTraceWithMoments",
    "discounted_returns",
    "eligibility_traces",
    "episodic_prefix_sum",
    "gae",
    "ppo_loss",
    "retrace",
    "retrace_categorical",
    "td_lambda",
    "vtrace",
    "vtrace_loss",
]
