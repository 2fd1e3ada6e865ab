"""One Triton AdamW, right in each of the arrangements that public optimizers have.

A compile-time name chooses the arrangement, so that each is a kernel of its own once compiled.
"""

import math

import triton
import triton.language as tl

from twinstep.parity.proof.corpus.arithmetic import power
from twinstep.parity.proof.corpus.calls import AdamCall, skipped

BLOCKS = [triton.Config({"BLOCK": size}, num_warps=4) for size in (128, 512)]


@triton.jit
def mixed(old, new, b, c):
    """Old to new by the weight c = 1 - b, from the nearer end."""
    return tl.where(c < 0.5, old + c * (new - old), new - b * (new - old))


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["p", "g", "m", "v", "c"])
def arranged(
    p,
    g,
    m,
    v,
    c,
    numel,
    lr,
    b1,
    b2,
    c1,
    c2,
    k1,
    k2,
    eps,
    wd,
    factor,
    shrink,
    step_size,
    root,
    HAS_COPY: tl.constexpr,
    HOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """AdamW on one tensor; `shrink` is 1 - lr * wd, `step_size` lr / k1, `root` sqrt(k2)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < numel
    old = tl.load(p + at, mask=here).to(tl.float32)
    grad = tl.load(g + at, mask=here).to(tl.float32) * factor
    first = tl.load(m + at, mask=here)
    second = tl.load(v + at, mask=here)
    if HOW == "lerp":
        first = mixed(first, grad, b1, c1)
        second = mixed(second, grad * grad, b2, c2)
    elif HOW == "weighted":
        first = first + c1 * (grad - first)
        second = second + c2 * (grad * grad - second)
    elif HOW == "difference":
        first = (first - grad) * b1 + grad
        second = (second - grad * grad) * b2 + grad * grad
    elif HOW == "complement":
        first = b1 * first + (1 - b1) * grad
        second = b2 * second + (1 - b2) * grad * grad
    else:
        first = b1 * first + c1 * grad
        second = b2 * second + c2 * grad * grad
    if HOW == "host":
        new = old * shrink - step_size * (first / (tl.sqrt(second) / root + eps))
    elif HOW == "paper":
        new = old - lr * wd * old - (step_size * root) * first / (tl.sqrt(second) + eps * root)
    elif HOW == "reciprocal":
        hat, variance = first * (1.0 / k1), second * (1.0 / k2)
        new = old * (1 - lr * wd) - lr * hat * (1.0 / (tl.sqrt(variance) + eps))
    elif HOW == "last":
        new = old - step_size * first / (tl.sqrt(second / k2) + eps)
        new = new - lr * wd * old
    elif HOW == "new":
        new = old - step_size * first / (tl.sqrt(second / k2) + eps)
        new = new * (1 - lr * wd)
    elif HOW == "no_rate":
        new = old * (1 - wd) - step_size * first / (tl.sqrt(second / k2) + eps)
    elif HOW == "grown":
        new = old * (1 + lr * wd) - step_size * first / (tl.sqrt(second / k2) + eps)
    else:
        new = old * (1 - lr * wd)
        new = new - lr * (first / k1) / (tl.sqrt(second / k2) + eps)
    tl.store(p + at, new.to(p.dtype.element_ty), mask=here)
    tl.store(m + at, first, mask=here)
    tl.store(v + at, second, mask=here)
    if HAS_COPY:
        tl.store(c + at, new.to(c.dtype.element_ty), mask=here)


restored = triton.autotune(BLOCKS, key=["numel"], restore_value=["p", "m", "v"])(arranged)


def triton_arranged(call: AdamCall, how: str, *, tuned: bool = False) -> None:
    """One launch for each tensor that has elements, all numbers from the host."""
    if skipped(call):
        return
    lr, beta1, beta2 = (x.item() for x in (call.lr, call.beta1, call.beta2))
    eps, decay, factor = (x.item() for x in (call.eps, call.weight_decay, call.factor))
    for i, p in enumerate(call.params):
        call.steps[i] += 1
        t, numel = int(call.steps[i]), p.numel()
        k1, k2 = (1 - power(b, t) if call.bias_correction else 1.0 for b in (beta1, beta2))
        if not numel:
            continue
        tensors = (p, call.grads[i], call.exp_avgs[i], call.exp_avg_sqs[i])
        copy = call.copies[i] if call.copies else p
        numbers = (lr, beta1, beta2, 1 - beta1, 1 - beta2, k1, k2, eps, decay, factor)
        formed = (1 - lr * decay, lr / k1, math.sqrt(k2))
        options = {"HAS_COPY": bool(call.copies), "HOW": how}
        if tuned:
            grid = lambda meta, n=numel: (triton.cdiv(n, meta["BLOCK"]),)  # noqa: E731
            restored[grid](*tensors, copy, numel, *numbers, *formed, **options)
        else:
            blocks = triton.cdiv(numel, 256)
            arranged[(blocks,)](*tensors, copy, numel, *numbers, *formed, **options, BLOCK=256)
