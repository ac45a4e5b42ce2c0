"""Commands that list and describe components: algorithms, data, models, papers, settings, doctor."""
