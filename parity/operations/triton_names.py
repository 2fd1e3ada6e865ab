"""Names of kernel arguments that Triton's own launcher overwrites.

Triton writes a Python function for each kernel, with the kernel's arguments as its arguments and
names of its own beside them. An argument called `params` is replaced by a dict there, and the
launch dies with "failed to specialize argument of type: dict", far from the cause.
"""

from __future__ import annotations

from collections.abc import Mapping

TAKEN = {
    "params": "failed to specialize argument of type: dict",
    "options": "duplicate argument 'options' in function definition",
    "backend": "object has no attribute 'get_tensor_specialization'",
    "specialize_impl": "object is not callable",
    "debug": "got multiple values for argument 'debug'",
}


def taken_names(namespace: Mapping[str, object]) -> list[str]:
    """One sentence for each argument of a Triton kernel in a namespace that cannot be launched."""
    found = []
    for value in namespace.values():
        kernel = value
        while hasattr(kernel, "fn") and not hasattr(kernel, "arg_names"):
            kernel = kernel.fn
        if not type(kernel).__module__.startswith("triton.runtime"):
            continue
        name = getattr(kernel, "__name__", "a kernel")
        for argument in getattr(kernel, "arg_names", ()):
            if argument in TAKEN:
                found.append(
                    f"Triton kernel {name} has an argument named {argument}, which Triton's "
                    f'launcher uses itself; launching says "{TAKEN[argument]}"; rename it'
                )
    return found
