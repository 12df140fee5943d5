"""Memory of a server: weights, KV blocks and workspaces."""
