"""The LL protocol: words that hold data and a flag instead of counters, tensor by tensor."""
