"""Densities and samplers of rows on the workers of a Dask cluster."""
