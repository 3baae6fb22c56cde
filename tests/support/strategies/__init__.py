"""Steps of a model that is split over ranks, and what they are compared with."""
