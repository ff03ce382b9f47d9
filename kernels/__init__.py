"""Credit assignment over ``[T, N]`` rollouts, and what an update evaluates: fused Triton kernels, or plain torch."""

from kernels.credit import Credit, CreditWithMoments, Scan, VTrace, VTraceWithMoments, gae, vtrace
from kernels.ppo_loss import PPOLoss, ppo_loss
from kernels.q_targets import retrace, retrace_categorical
from kernels.returns import discounted_returns, td_lambda
from kernels.traces import eligibility_traces, episodic_prefix_sum
from kernels.twin_mlp import TwinOutputs, twin_mlp
from kernels.vtrace_loss import VTraceLoss, vtrace_loss

__all__ = [
    "Credit",
    "CreditWithMoments",
    "PPOLoss",
    "Scan",
    "TwinOutputs",
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
    "twin_mlp",
    "vtrace",
    "vtrace_loss",
]
