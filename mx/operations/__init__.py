"""What people who run a fleet use: the page, `mx top`, `mx doctor`, the demonstration, benchmarks,
and what a service manager is told."""
