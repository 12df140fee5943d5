"""Memory model: saved activations, model states, the ledger of a rank."""
