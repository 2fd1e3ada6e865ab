"""The conformance suite: every opcode form that replay supports, against what it means.

`forms.supported()` derives the list from the grammar that replay itself accepts; a form is covered
by a statement (`statements`: what the result bits are, in integers and fractions) or by a program
(`memory`, `threads`: a small kernel and what it leaves behind). `suite` puts them together, `run`
executes them on replay or through the CUDA driver.
"""
