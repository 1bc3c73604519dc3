// The entry. TensorBoard imports this module in a separate frame and calls render().

import { App } from './app.js';
import { element } from './dom.js';
import { ServerSource } from './source.js';
import { watchTheme } from './theme.js';

/** Builds the page. */
export async function render() {
  document.documentElement.lang = 'en';
  document.title = 'Scales';
  const style = element('link', { rel: 'stylesheet', href: new URL('style.css', import.meta.url) });
  // Wait for the style, since the layout depends on it.
  await new Promise((resolve) => {
    style.addEventListener('load', resolve);
    style.addEventListener('error', resolve);
    document.head.append(style);
  });
  const app = new App(new ServerSource(new URL('../', import.meta.url)), watchTheme());
  window.scalesDashboard = app;
  document.body.append(app.node);
  await app.start();
}
