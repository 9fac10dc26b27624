"""Stands in for xformers, whose memory-efficient attention is for GPUs."""
