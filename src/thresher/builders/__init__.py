"""From config to parts: the objective, the data, the engines, the reference. No loop and no numerics here."""
