"""One search for what fits: candidates are tried once each, by a strategy that is data, and the answer is confirmed."""
