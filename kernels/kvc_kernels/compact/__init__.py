"""Compaction: packing of full blocks, and repacking of packed blocks."""
