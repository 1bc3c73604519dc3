"""What captured graphs are made of (nodes, products, views), and ordered passes over them."""
