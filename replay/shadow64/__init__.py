"""Float64 shadow values: what a kernel's own formula gives without its roundings."""
