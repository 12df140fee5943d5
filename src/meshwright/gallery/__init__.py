"""Worked examples: figures that texts on distributed training print, recomputed step by step by the project's own code.

`examples.py` lists them; `text.py`, `page.py` and `Explanation.to_json_dict` render them. Free of torch.
"""
