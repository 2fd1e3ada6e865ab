"""Which packages the project needs, and which installed versions will do in their place."""

from __future__ import annotations

# Lowest version that will do, and the first that will not ("" = no such end).
REQUIRED = {
    "torch": ("2.9", ""),
    "triton": ("3.6", "3.10"),
    "numpy": ("1.26", ""),
    "hypothesis": ("6.100", ""),
    "rich": ("13", ""),
    "typer": ("0.12", ""),
}
OPTIONAL = {
    "pytest": "make test",
    "matplotlib": "pictures of scenarios",
    "pytest-xdist": "parallel tests",
    "ruff": "make check",
    "mypy": "make check",
    "import-linter": "make check",
    "pre-commit": "the commit hooks",
}


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.11.0+cu130" → (2, 11, 0)."""
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def unsuitable(found: dict[str, str]) -> str:
    """What is missing, too old or too new, in words; "" if the required packages are all fine."""
    problems = []
    for name, (oldest, too_new) in REQUIRED.items():
        if name not in found:
            problems.append(f"no {name}")
        elif release(found[name]) < release(oldest):
            problems.append(f"{name} {found[name]} is older than {oldest}")
        elif too_new and release(found[name]) >= release(too_new):
            problems.append(f"{name} {found[name]} is untested, needs < {too_new}")
    return ", ".join(problems)
