"""The bundled demo model: a Hugging Face folder that ``from_pretrained("demo")`` loads, and the code that made it."""
