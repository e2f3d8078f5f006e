"""Engines that are servers: their protocols, processes and clients."""
