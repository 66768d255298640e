"""How wrong is `brigade plan`? Published runs (`runs`), their programs (`programs`), and the comparison (`study`)."""
