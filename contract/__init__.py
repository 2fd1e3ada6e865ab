"""Promises of both sides that neither computes: errors, checks, protocols, checkpoints.

`reference` and `fast` import it; it imports torch and the standard library. Nothing here does
arithmetic on tensors, so that no mistake of arithmetic can be shared.

errors       MinimumLossScale, and values in sentences
compat       Compat: upstream's behaviour on request
hyper        hyper-parameters of the optimizers with moments, checked
keywords     keywords and group options of torch's optimizers
refusals     arguments that exist for callers of upstream
tensors      parameters, gradients and saved tensors, checked; gradients dropped
shards       DTensors, late results, and whole tensors of FSDP's parts
moments      state of Adam and LAMB: made, and loaded as it was stored
apex_lamb    `FusedLAMB` but for its arithmetic
loss_scale   arguments and saved states of loss scalers, checked
wrapper      an optimizer around another one, on master weights
scaled       an optimizer that scales its loss, from outside
copies       copies and pickles of an optimizer around another one
gradient_mark  gradients that the optimizer's own `backward` did not leave
uncompiled   steps that torch.compile leaves as they are
timers       timers by phase that never wait
parallel     process groups, model-parallel units, engines
moe          experts, and groups that hold nothing else
fragments    places of parameters in partitions
zero         options of ZeroOptimizer: what may be combined
sharded      names of ZeroOptimizer that read and save
accumulated  masters split over ranks, beside accumulated gradients
whole        weights and states of parameters whose masters are split over ranks
agreement    what one rank cannot do, no rank does
checkpoint/  files, state dicts, universal checkpoints
"""

if __name__ != "twinstep.contract":
    raise ImportError("import twinstep.contract, not contract")
