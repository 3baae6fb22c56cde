"""Rules on the metrics of a run that say, while it trains, what goes wrong and which setting to change."""
