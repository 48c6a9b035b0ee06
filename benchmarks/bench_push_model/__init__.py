"""A model of weight pushes of large models, and the same model beside a real push of a small one."""
