"""Words of data and a flag in the place of counters (the LL protocol), tensor by tensor."""
