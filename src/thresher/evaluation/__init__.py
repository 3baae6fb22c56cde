"""Evaluation after training: benchmarks of lm-eval, and answers to the questions of AlpacaEval and Arena-Hard."""
