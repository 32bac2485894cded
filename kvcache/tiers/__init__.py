"""Tiers below the host pool: what it lets go of stays in slower memory or in files, and comes back when it is wanted.

The prefix cache stays the owner of names: what a tier holds is of use only once it is back in pool pages, verified, and
kept by the cache under its name. The tier above the pool, an accelerator's memory, is its engine's own.
"""
