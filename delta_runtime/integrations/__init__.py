"""Callbacks for trainers, one module a library: `transformers`, `lightning`. Each imports its library."""
