"""Engines that start while their weights arrive: each module adapts one."""
