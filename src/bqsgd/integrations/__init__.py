"""Privacy for apps of other frameworks: `bqsgd.integrations.flower` and `bqsgd.integrations.nvflare`."""
