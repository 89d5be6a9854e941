"""What a torch does with dtypes, row by row: which operations on which operands, and the answer.

The same rows run in two places: inside a real torch 1.2.0, whose answers are recorded in
``data/torch-1.2/rules.csv``, and in this torch under ``torch12_rules()``, to be compared with
them (``rules/comparison.py``). So this package keeps to Python 3.6, the standard library and
what torch had in 1.2 and has today.
"""
