"""Fine-tuning from one configuration file: `bitwright train CONFIG.toml`."""
