"""Tool calls: what callers may ask for, and how models write them. Knows no HTTP and no engine."""
