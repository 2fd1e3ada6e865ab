"""PTX text: tokens, syntax, control flow, and where its lines come from."""
