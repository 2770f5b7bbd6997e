"""Layers that compute some tokens only: routers, predictors, and the layer around them."""
