"""The ``fedflat flatness`` commands, one module per command or family; may import all layers below ``cli``."""
