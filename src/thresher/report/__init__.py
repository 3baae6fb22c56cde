"""`thresher report`: the logs of runs as one HTML file that needs no network. Nothing here trains or loads a model."""
