"""How a builtin is declared: its decorator, and the kinds of its operands."""
