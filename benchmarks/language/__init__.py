"""Language models within a budget: what caches, formats, streams and shared cards take, beside what others do."""
