"""Pictures and numbers that explain a compressed net."""
