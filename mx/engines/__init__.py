"""Engines that start while their weights arrive: each module adapts one, and imports it when used."""
