"""Compact: the packing of full blocks, and the repacking of packed ones."""
