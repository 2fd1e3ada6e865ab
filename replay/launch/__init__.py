"""One launch from start to record: options, parameters, batches, counters."""
