"""A second, independent statement of the ISA, in Python integers and fractions."""
