"""Steps of a model in this process: what a scheduler and a model cost by themselves."""
