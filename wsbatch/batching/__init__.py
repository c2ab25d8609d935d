"""WHEN and WHO: scheduling without trio, torch or a clock of its own; `now_s` is always an argument."""
