"""The model architecture as data: configuration, families, presets, `config.json`, the parameter table, pipeline
partition. Free of torch.
"""
