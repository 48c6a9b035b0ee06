"""`headrace plan`: estimates the hardware that a run needs, from sizes and measured rates."""
